"""Turning prompts into completions with one compiled prefill and one compiled decode loop."""
