"""Quality of slices: masks of tissue, figures of merit, and a report of a run."""
