"""The process in which a script is examined."""

import atexit

from halfstep import core
from halfstep.diagnose._examiner import Examiner
from halfstep.launch import Job, Send, Session, run_script, serve


def main() -> None:
    """Runs the job that is this process's only argument."""
    serve({"doctor": _examine})


def _examine(job: Job, send: Send) -> None:
    examiner = Examiner(send, every=job.every, steps=job.steps)
    session = Session(
        send, policy=job.policy, overrides=job.overrides, seed=job.seed, meet=examiner.meet
    )
    session.start()
    core.subscribe(examiner)
    examiner.stop = session.finish
    # Registered before the script runs, so called after everything that the script registers.
    atexit.register(examiner.finish)
    run_script(job, send)
