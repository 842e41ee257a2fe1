package clock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Things happen by their times, at the same time in the order in which they were asked for, and may ask for more.
func TestClock(t *testing.T) {
	var c Clock
	var seen []string
	note := func(name string) func() {
		return func() { seen = append(seen, c.Now().String()+" "+name) }
	}
	c.At(2*time.Second, note("b"))
	c.After(time.Second, func() {
		note("a")()
		c.After(time.Second, note("d"))
	})
	c.At(2*time.Second, note("c"))
	for c.Next() {
	}
	require.Equal(t, []string{"1s a", "2s b", "2s c", "2s d"}, seen)
	require.False(t, c.Next())
}
