"""How the ranks of a run keep together: what they agree on, what stops them, and how a lost one is noticed."""
