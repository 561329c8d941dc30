"""The options of the commands for studies of many jobs. They import `options` and what it imports."""
