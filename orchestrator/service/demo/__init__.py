"""An overnight queue in five minutes: five jobs, two of which run out of memory and recover."""
