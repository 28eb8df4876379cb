"""Which method trains fastest on a link: clocks from short runs, and prices."""
