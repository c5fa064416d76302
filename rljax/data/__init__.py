"""From tasks to device arrays: prompt streams, the tokenizer, and packing."""
