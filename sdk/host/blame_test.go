package host

import (
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The error of a plugin that fails while it is asked or opened names its binary, the phase, how its
// process ended and what it said last.
func TestEarlyFailuresAreNamed(t *testing.T) {
	for fault, want := range map[string][]string{
		"exit_describe": {"describe: ", "process ended: exit status 3", `"no licence to describe"`},
		"exit_open":     {"open: scheduler side: ", "process ended: exit status 3", `"no licence to open"`},
		"hang_describe": {"describe: no answer from the plugin in time"},
		"hang_open":     {"open: no answer in time: scheduler side: "},
	} {
		t.Run(fault, func(t *testing.T) {
			leaks := watchLeaks(t)
			o := rigOptions{extra: map[string]any{"fault": fault}}
			if strings.HasPrefix(fault, "hang") {
				o.settings = map[string]any{"deadlines": map[string]any{"handshake": "700ms"}}
			}
			cfg, eng, opts := o.build(t)
			_, err := Open(t.Context(), cfg, eng, opts)
			require.ErrorIs(t, err, ErrConfig)
			t.Log(err)
			for _, text := range append(want, "plugin "+testPlugin()+": ") {
				require.ErrorContains(t, err, text)
			}
			for _, text := range []string{"\n", "RST_STREAM", "extra_config", "signal: killed"} {
				require.NotContains(t, err.Error(), text)
			}
			leaks()
		})
	}
}

func TestLastLine(t *testing.T) {
	for in, want := range map[string]string{
		"":                                 "",
		"a\nb\n\n":                         "b",
		`{"@message":"m","@level":"warn"}`: "m",
		`{"@message":1}`:                   `{"@message":1}`,
		"x\npanic: as told\n\ngoroutine 1": "panic: as told",
	} {
		p := newPlainLines(io.NopCloser(strings.NewReader(in)))
		_, err := io.ReadAll(p)
		require.NoError(t, err)
		require.Equal(t, want, p.lastLine(), in)
	}
}
