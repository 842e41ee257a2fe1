package agent

// engineVariable makes this test binary a process of a foreign engine.
const engineVariable = "KVPORT_TEST_ENGINE"

func playEngine() int { return 0 }
