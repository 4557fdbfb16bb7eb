"""What rlkit asks of the machine: files, processors, devices, deadlines, random numbers, who owns a
folder."""
