"""Where the time of a request goes, in every process that it passes: spans, how they come about, and the file that shows them."""
