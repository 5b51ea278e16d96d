"""A server that speaks the OpenAI API, in the process of its engine."""
