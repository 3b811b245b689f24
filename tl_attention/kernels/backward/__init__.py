"""The backward: by_keys.py makes dk, dv and mostly dq; by_queries.py makes dq alone."""
