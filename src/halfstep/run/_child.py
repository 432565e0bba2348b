"""The process of one run of a script, or of one measurement."""

import atexit

from halfstep.launch import Job, Send, Session, run_script, serve, telling_errors


def main() -> None:
    """Runs the job that is this process's only argument."""
    serve({"train": _train, "memory": _train, "model": _measure})


def _train(job: Job, send: Send) -> None:
    session = Session(send, policy=job.policy, seed=job.seed, memory=job.task == "memory")
    session.start()
    # Registered before the script runs, so called after everything that the script registers.
    atexit.register(session.finish)
    run_script(job, send)


def _measure(job: Job, send: Send) -> None:
    from halfstep.run._model_child import measure_model

    with telling_errors(send):
        measure_model(job, send)
