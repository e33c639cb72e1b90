from stretto import GRPOTrainer

ask = "What is {}+{}? Reply with the number only."
sums = [{"prompt": ask.format(a, b), "answer": str(a + b)} for a in range(1, 21) for b in range(1, 21)]


def reward(completion, answer):
    return (completion.strip() == answer) + 0.3 * sum(map(str.isdigit, completion)) / max(len(completion), 1)


settings = {"steps": 60, "learner": {"lr": 3e-5}, "sampling": {"max_tokens": 6}, "data": {"system": "Calculator"}}
GRPOTrainer(settings, actor_model="smollm2-135m", reward_model=reward, data_provider=sums).train()
