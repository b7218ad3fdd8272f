"""Loop programs, one per file. Get them by name with :func:`loopinterp.rasp.get_program`."""
