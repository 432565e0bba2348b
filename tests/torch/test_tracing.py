import subprocess
import sys

from halfstep.torch._tracing import parse_source

LOADS = "import sys, halfstep.torch; print('torch._dynamo' in sys.modules)"
USES = """
import torch
from halfstep.torch import autocast

@autocast("cpu", dtype=torch.bfloat16)
def decorated_before_the_compiler_was_loaded(values):
    return values @ values

compiled = torch.compile(
    decorated_before_the_compiler_was_loaded, fullgraph=True, backend="aot_eager"
)
print(compiled(torch.ones(2, 2)).dtype)
"""


def output(program):
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_importing_does_not_load_the_compiler():
    assert output(LOADS) == "False"


def test_a_compiler_that_is_loaded_later_knows_the_functions_for_its_graphs():
    assert output(USES) == "torch.bfloat16"


def test_a_source_without_modules_has_no_path():
    assert parse_source("L['inputs']") == ""
