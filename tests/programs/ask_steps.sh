# A worker that is no Python program: ask_steps.sh FOLDER PYTHON STRIDE
step=0
while [ $step -lt 2000 ]; do
    "$2" -m muster.agent ask stop --step $step
    answer=$?
    if [ $answer = 10 ]; then
        echo $step >"$1/rank$RANK"
        echo "rank $RANK stops at step $step"
        exit 0
    fi
    [ $answer = 0 ] || exit 3
    [ $step != $((2 * $3)) ] || echo "rank $RANK asks"
    step=$((step + $3))
done
exit 4
