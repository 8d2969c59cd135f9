"""Many workers behind one call: which ranks there are, what each is given, and how their answers become one."""
