"""What a run tells people and files: metrics, their sinks, and the live view."""
