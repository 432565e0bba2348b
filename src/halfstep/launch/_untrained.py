"""Why a run shows no training step, as far as it can be told."""

from halfstep.launch._runs import RunResult

WHAT_TO_CHECK = (
    "Looked for were optimizer steps and calls of backward() in PyTorch, fit and loops in Keras, "
    "and functions in JAX that take gradients, in the process of the script. Check that it trains "
    "under plain python with the same arguments: its own go after --."
)


def why_untrained(run: RunResult) -> str:
    """Returns what was seen of training and what was not.

    Args:
        run: A run without steps.

    Example:
        >>> why_untrained(RunResult(policy="float32"))
        'neither PyTorch nor Keras was imported'
    """
    versions = dict(run.versions)
    seen = (
        (run.optimizer_steps, "scaler.step() was called, but scaler.update() never was"),
        (run.losses, "losses were scaled, but neither backward() nor an optimizer step followed"),
        ("keras" in versions, "no model of Keras was fitted, and no optimizer stepped"),
        ("torch" not in versions, "neither PyTorch nor Keras was imported"),
    )
    nothing = (
        "neither a call of backward() nor an optimizer step was seen; gradients from "
        "torch.autograd.grad and other processes cannot be"
    )
    return next((reason for found, reason in seen if found), nothing)
