#!/bin/bash
echo 9 > answer.txt
