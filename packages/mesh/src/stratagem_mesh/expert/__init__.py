"""Expert parallelism: ranks that divide the experts of a model, and exchange its tokens."""
