"""Training scripts that bring a precision of their own, and go wrong in it."""

NET = """
import torch
from torch import nn
# REMEDY


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.ff, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    FORWARD


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# PREPARED
"""
FORWARD = """DECORATED
    def forward(self, inputs):
        hidden = self.ff(self.enter(inputs) * 3e5)
        return self.leave(hidden / (1.0 + hidden.abs()))"""
INSIDE = """def forward(self, inputs):
        with AUTOCAST:
            hidden = self.ff(self.enter(inputs) * 3e5)
            return self.leave(hidden / (1.0 + hidden.abs()))"""
NESTED = """def forward(self, inputs):
        hidden = self.enter(inputs)
        with AUTOCAST:
            hidden = self.ff(hidden * 3e5)
        return self.leave(hidden.float() / (1.0 + hidden.float().abs()))"""
# The loss stays finite, and its gradients do not.
HIDDEN = """def forward(self, inputs):
        hidden = self.ff(self.enter(inputs))
        return torch.tanh(self.leave(torch.relu(hidden * 3e5)))"""
AROUND = """
SCALER
for step in range(8):
    inputs = torch.randn(32, 8)
    optimizer.zero_grad()
    with AUTOCAST:
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :2].argmax(1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
ONLY_THE_MODEL = AROUND.replace(
    "        loss = nn.functional.cross_entropy(model(inputs)",
    "        made = model(inputs)\n    loss = nn.functional.cross_entropy(made.float()",
)
NOWHERE = AROUND.replace("    with AUTOCAST:\n    ", "")
OUTER = AROUND.replace("AUTOCAST", 'torch.autocast("cpu", dtype=torch.bfloat16)')
ACCUMULATED = """
SCALER
for step in range(8):
    optimizer.zero_grad()
    for _ in range(2):
        inputs = torch.randn(32, 8)
        with AUTOCAST:
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :2].argmax(1))
        scaler.scale(loss / 2).backward()
    scaler.step(optimizer)
    scaler.update()
"""
CLOSURE = """
SCALER
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
inputs = torch.randn(32, 8)


def closure():
    optimizer.zero_grad()
    with AUTOCAST:
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :2].argmax(1))
    loss.backward()
    return loss


for step in range(8):
    optimizer.step(closure)
"""
SCALED_CLOSURE = CLOSURE.replace("    loss.backward", "    scaler.scale(loss).backward").replace(
    "optimizer.step(closure)", "scaler.step(optimizer, closure)\n    scaler.update()"
)
UNSCALED = AROUND.replace("scaler.scale(loss).backward()", "loss.backward()").replace(
    "    scaler.step(optimizer)\n    scaler.update()", "    optimizer.step()"
)
DECORATED = """
SCALER


@AUTOCAST
def loss_of(inputs):
    return nn.functional.cross_entropy(model(inputs), inputs[:, :2].argmax(1))


for step in range(8):
    optimizer.zero_grad()
    scaler.scale(loss_of(torch.randn(32, 8))).backward()
    scaler.step(optimizer)
    scaler.update()
"""
COMPILED = AROUND.replace("SCALER", 'model = torch.compile(model, backend="eager")\nSCALER')
AUTOCASTS = {
    "ours": 'halfstep.torch.autocast("cpu", dtype=torch.float16)',
    "native": 'torch.autocast("cpu", dtype=torch.float16)',
}
SCALERS = {
    "ours": 'scaler = halfstep.torch.GradScaler("cpu", init_scale=8.0)',
    "native": 'scaler = torch.amp.GradScaler("cpu", init_scale=8.0)',
}
PLACES = {
    "around": (FORWARD, AROUND),
    "only the model": (FORWARD, ONLY_THE_MODEL),
    "inside": (INSIDE, NOWHERE),
    "decorated forward": (FORWARD.replace("DECORATED", "@AUTOCAST"), NOWHERE),
    "decorated loss": (FORWARD, DECORATED),
    "nested": (NESTED, OUTER),
    "accumulated": (FORWARD, ACCUMULATED),
    "closure": (FORWARD, CLOSURE),
    "compiled": (FORWARD, COMPILED),
    "unscaled": (HIDDEN, UNSCALED),
    "unscaled closure": (HIDDEN, CLOSURE),
}
# PyTorch's own scaler takes no closures.
CASES = [(place, whose) for place in PLACES for whose in AUTOCASTS] + [("scaled closure", "ours")]
PLACES["scaled closure"] = (FORWARD, SCALED_CLOSURE)


def script(place, whose, *, autocast="", remedy=""):
    """Returns a script, with an autocast in place of its own, and a remedy pasted on top."""
    forward, loop = PLACES[place]
    text = NET.replace("FORWARD", forward).replace("DECORATED\n    ", "") + loop
    text = text.replace("AUTOCAST", autocast or AUTOCASTS[whose])
    text = text.replace("SCALER", SCALERS[whose]).replace("# REMEDY", remedy or "# REMEDY")
    return f"import halfstep.torch\n{text}" if whose == "ours" else text


def line_of(text, part):
    """Returns the number of the first line of a text that holds a part."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


SOUND = """
import halfstep.torch
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# PREPARED
SCALER
for step in range(20):
    inputs = torch.randn(32, 8)
    optimizer.zero_grad()
    with AUTOCAST:
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :2].argmax(1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def sound(autocast, scaler, prepared=""):
    """Returns a script in which nothing goes wrong that is the model's."""
    text = SOUND.replace("AUTOCAST", autocast).replace("# PREPARED", prepared)
    return text.replace("SCALER", f"scaler = {scaler}")
