"""One folder a compiler; each lowers the graph its own way. registry.py knows them all."""
