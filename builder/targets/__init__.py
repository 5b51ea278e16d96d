"""One folder a compiler; each lowers the graph its own way."""
