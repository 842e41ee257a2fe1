package report

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/bench"
)

func TestTimeline(t *testing.T) {
	at := func(name string, ms float64) bench.Row { return bench.Row{Name: name, Value: &ms, Unit: "ms"} }
	rows := []bench.Row{
		at("layer 0 computed", 10),
		at("layer 0 confirmed", 12),
		at("layer 1 computed", 20),
		at("layer 1 confirmed", 27),
		at("last layer's compute ends", 25),
	}
	svg := string(Timeline(append(rows, at("layer 99 computed", 1), bench.Row{Name: "layer 2 computed", Unit: "absent"})))
	require.Contains(t, svg, ">2.0 ms<")
	require.Contains(t, svg, ">7.0 ms<")
	require.Contains(t, svg, "ends at 25 ms")
	require.Contains(t, svg, "#c0623a", "confirmed too late")
	require.NotContains(t, svg, "layer 2<")
	require.Equal(t, svg, string(Timeline(rows)))
}
