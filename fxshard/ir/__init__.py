"""What a program is: the graph with its tags, operators, units, schedule, domain and text."""
