"""What `dpmon doctor` looks at: a module a subject, each a function that gives Checks."""
