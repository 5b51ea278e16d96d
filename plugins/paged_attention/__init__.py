"""plansmith::PagedAttention: writes a step's keys and values into the paged pools and attends over them."""
