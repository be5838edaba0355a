"""Opens arrays ahead."""
