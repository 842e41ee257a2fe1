package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// serve and route show which program they are.
func TestBuildInfo(t *testing.T) {
	t.Parallel()
	families, err := newRegistry().Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != "kvport_build_info" {
			continue
		}
		labels := map[string]string{}
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		require.Equal(t, buildVersion(), labels["version"], "as kvport version says it")
		require.InDelta(t, 1, f.GetMetric()[0].GetGauge().GetValue(), 0)
		return
	}
	require.Fail(t, "no kvport_build_info")
}
