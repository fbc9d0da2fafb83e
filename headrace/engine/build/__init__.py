"""Compiled engines: from a checkpoint to the files that runners other than torch's run, one graph for each rank."""
