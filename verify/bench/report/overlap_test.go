package report

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/bench"
)

func TestOverlapTimeline(t *testing.T) {
	at := func(name string, ms float64) bench.Row { return bench.Row{Name: name, Value: &ms, Unit: "ms"} }
	rows := []bench.Row{
		at("layer 0 asked for", 1), at("layer 0 verified and read", 3), at("layer 1 asked for", 5), at("layer 1 verified and read", 9.5),
		at("the load is over", 9), at("the first token is there", 12),
	}
	svg := string(OverlapTimeline(append(rows, at("layer 7 asked for", 2), bench.Row{Name: "layer 2 asked for", Unit: "absent"})))
	require.Contains(t, svg, ">3.0 ms<")
	require.Contains(t, svg, ">9.5 ms<")
	require.Contains(t, svg, "the load is over at 9.0 ms, the first token is there at 12.0 ms")
	require.Equal(t, 1, strings.Count(svg, "#2e8b57"), "the first layer was read during the load")
	require.Equal(t, 1, strings.Count(svg, "#c0623a"), "the second one was not")
	require.NotContains(t, svg, "layer 2<")
	require.Equal(t, svg, string(OverlapTimeline(rows)))
}
