"""A plan or a policy, carried out on a live step."""
