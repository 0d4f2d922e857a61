"""Tasks: rows that have a prompt, an answer that can be checked, and a completion that is right. One file a task."""
