"""Tools served over HTTP to many machines. Needs the extra ``servers``; nothing imports this package."""
