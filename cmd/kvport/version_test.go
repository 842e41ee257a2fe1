package main

import (
	"bytes"
	"io"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVersion(t *testing.T) {
	var sub, flag bytes.Buffer
	require.Zero(t, run([]string{"version"}, &sub, io.Discard))
	require.Zero(t, run([]string{"--version"}, &flag, io.Discard))
	require.Equal(t, flag.String(), sub.String())
	require.Regexp(t, `^kvport \S+\n$`, sub.String())
	require.NotContains(t, sub.String(), "unknown", "the Go command notes something in every binary")
}

func TestNotedVersion(t *testing.T) {
	settings := []debug.BuildSetting{{Key: "vcs.revision", Value: "0123456789abcdef0123"}, {Key: "vcs.modified", Value: "true"}}
	for want, info := range map[string]debug.BuildInfo{
		"v1.2.3":             {Main: debug.Module{Version: "v1.2.3"}, Settings: settings},
		"0123456789ab+dirty": {Main: debug.Module{Version: "(devel)"}, Settings: settings},
		"0123456789ab":       {Settings: settings[:1]},
		"devel":              {Main: debug.Module{Version: "(devel)"}},
	} {
		require.Equal(t, want, notedVersion(&info))
	}
}
