"""``headrace bench``: what is sent (dataset, synthetic, arrivals), to whom (target, drive), and what became of it (records, report)."""
