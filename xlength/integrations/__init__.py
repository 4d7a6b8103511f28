"""xlength inside other frameworks. Each module needs the framework, and is imported by its name."""
