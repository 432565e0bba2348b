"""Starts scripts, here or in a process of their own, and listens to how they train."""

from halfstep.launch._asked import explain_exit, runnable_policy
from halfstep.launch._effect import (
    LIKELY_REASONS,
    NO_REGION,
    UNSCALED,
    asked_text,
    own_policies,
    policy_text,
    why_ineffective,
)
from halfstep.launch._followed import Enough, Watcher, follow
from halfstep.launch._job import Job
from halfstep.launch._log import RunLog
from halfstep.launch._probe import NoProbe, Probe, processor_name, torch_probe
from halfstep.launch._process import run_process
from halfstep.launch._recorder import Recorder, Send
from halfstep.launch._runs import MetricValue, RunResult, Skip
from halfstep.launch._script import Script, first_on_path, script_trace
from halfstep.launch._serve import run_script, serve, telling_errors
from halfstep.launch._session import Session
from halfstep.launch._stdin import SharedInput
from halfstep.launch._untrained import WHAT_TO_CHECK, why_untrained

__all__ = [
    "LIKELY_REASONS",
    "NO_REGION",
    "UNSCALED",
    "WHAT_TO_CHECK",
    "Enough",
    "Job",
    "MetricValue",
    "NoProbe",
    "Probe",
    "Recorder",
    "RunLog",
    "RunResult",
    "Script",
    "Send",
    "Session",
    "SharedInput",
    "Skip",
    "Watcher",
    "asked_text",
    "explain_exit",
    "first_on_path",
    "follow",
    "own_policies",
    "policy_text",
    "processor_name",
    "run_process",
    "run_script",
    "runnable_policy",
    "script_trace",
    "serve",
    "telling_errors",
    "torch_probe",
    "why_ineffective",
    "why_untrained",
]
