"""What `tokenmill doctor` looks at for a worker: its settings, model, machine and files. Imported by name."""

from worker.doctor.worker_checks import checks

__all__ = ["checks"]
