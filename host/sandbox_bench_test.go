package host

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/sandbox"
)

// BenchmarkLaunch is a plugin's start until it answers, and its end, with and without the sandbox. The binary of the test
// is the trampoline.
func BenchmarkLaunch(b *testing.B) {
	for name, box := range map[string]*Sandbox{"outside": nil, "sandbox": {of: sandbox.Spec{Trampoline: Self}}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				p, err := Launch(b.Context(), testPlugin(), LaunchOptions{Sandbox: box})
				require.NoError(b, err)
				p.Kill()
			}
		})
	}
}
