#!/bin/bash
awk -F, '$1 == "north" {sum += $2} END {print sum}' sales.csv > total.txt
