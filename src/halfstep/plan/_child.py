"""The process in which a script is planned for."""

from halfstep import core
from halfstep.launch import Job, Send, Session, run_script, serve
from halfstep.plan._planner import Planner


def main() -> None:
    """Runs the job that is this process's only argument."""
    serve({"plan": _plan})


def _plan(job: Job, send: Send) -> None:
    planner = Planner(send, step=job.steps, seconds=job.seconds, budget=job.budget)
    Session(send, policy=job.policy, seed=job.seed, meet=planner.meet).start()
    core.subscribe(planner)
    try:
        run_script(job, send)
    finally:  # a script may end by exit()
        send({"kind": "steps", "steps": planner.steps})
