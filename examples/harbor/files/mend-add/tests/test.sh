#!/bin/bash
# the share of the sums that the program prints
right=0
while read -r a b sum; do
    if [ "$(python3 add.py "$a" "$b")" = "$sum" ]; then
        right=$((right + 1))
    fi
done < /tests/sums.txt
awk "BEGIN {print $right / 4}" > /logs/verifier/reward.txt
