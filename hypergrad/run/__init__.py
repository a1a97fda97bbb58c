"""Steps, their inverses and the loops over them, and how a run went. Knows nothing of the derivative of the run."""
