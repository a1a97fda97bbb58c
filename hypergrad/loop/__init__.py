"""Stepping forward by `step`, backward by `unstep`, in a scan or from the host. Knows no derivative of the run."""
