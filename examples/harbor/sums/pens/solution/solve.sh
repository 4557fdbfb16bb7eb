#!/bin/bash
echo 19 > answer.txt
