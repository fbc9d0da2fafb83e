"""Text by postprocess workers: ``shard`` knows what one worker was fed and has answered, ``pool`` has the processes."""
