package connector

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// An error about thousands of blocks stays readable.
func TestErrorsNameTheFirstFew(t *testing.T) {
	many := make([]BlockID, 1489)
	for i := range many {
		many[i] = BlockID(i)
	}
	require.Equal(t, "1489 blocks [0 1 2 3 4 5 6 7] and 1481 more: "+ErrGone.Error(), (&BlockError{Blocks: many, Err: ErrGone}).Error())
	require.Equal(t, "2 items [3 5]: "+ErrGone.Error(), (&ItemError{Items: []int{3, 5}, Err: ErrGone}).Error())
}
