"""Trains a small language model of Hugging Face transformers with a loop written by hand."""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def gpt2(length, attention):
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=length,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation=attention,
        )
    )


def llama(length, attention):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            max_position_embeddings=length,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=attention,
        )
    )


def load_blocks(length):
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="sdpa")
    parser.add_argument("--length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--steps", type=int, default=150, help="updates of the parameters")
    parser.add_argument("--accumulation", type=int, default=2, help="batches per update")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-interval", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = {"gpt2": gpt2, "llama": llama}[args.model](args.length, args.attention)
    loader = DataLoader(load_blocks(args.length), batch_size=8, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / args.steps))
    model.train()
    done = 0
    while done < args.steps * args.accumulation:
        for batch in loader:
            outputs = model(input_ids=batch, labels=batch)
            loss = outputs.loss / args.accumulation
            loss.backward()
            if done % args.log_interval == 0:
                print(f"batch {done}: loss {outputs.loss.item()}")
            done += 1
            if done % args.accumulation == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if done == args.steps * args.accumulation:
                break


if __name__ == "__main__":
    main()
