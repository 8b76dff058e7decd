"""The `kvconnect` command: one file per subcommand, each imported when it is called."""
