"""Memory as the cost model predicts it and as a counted malloc measures it."""
