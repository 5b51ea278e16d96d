"""Draft tokens verified on the device: how many are accepted, and what each sequence emits."""
