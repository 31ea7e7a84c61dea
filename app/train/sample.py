"""A labelled English and Chinese sample, generated here, so that a fresh machine can train without data or network.

Every text is about one of six subjects. Its sentences mix words of that subject with words common to all and, now and then, with words of
another subject, so that the task is learnable but not by one word. Lengths are log-normal, as those of natural text are.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

ROWS = 5000

_ENGLISH = {
    "food": "soup noodle rice kitchen oven recipe pepper garlic onion bread butter taste cook dish sauce tea breakfast dinner fresh sweet spicy fry boil "
    "chef market basket flavour dumpling vegetable plate",
    "travel": "train station ticket airport hotel luggage map bridge island passport journey flight platform tourist guide border ferry road mountain "
    "village coast window seat driver arrival delay departure luggage trip",
    "sport": "team goal match player coach race runner stadium score league final referee training ball tennis swim medal season defence sprint "
    "injury captain crowd champion halftime penalty record",
    "health": "doctor clinic patient nurse medicine fever sleep blood heart surgery vaccine symptom pain diet exercise hospital therapy dose lung "
    "allergy recovery skin bone infection test pulse",
    "finance": "bank loan market price stock interest tax budget invoice account credit bond profit loss investor currency fund payment debt salary "
    "audit insurance trade rate dividend contract",
    "science": "cell energy orbit planet laboratory theory atom experiment telescope protein signal particle data model measure ocean climate species "
    "gravity fossil crystal wave magnet sample hypothesis sensor",
}
_ENGLISH_COMMON = (
    "the a this that some every new old good long small large first last again often today yesterday people we they he she it said found "
    "wanted needed began kept made took gave with without near after before because although while and but so for from about"
).split()
_CHINESE = {
    "food": "米饭 面条 厨房 味道 辣椒 大蒜 早餐 晚饭 水饺 蔬菜 炒菜 汤 厨师 茶叶 甜点 新鲜 酱油 盘子 菜谱 烤箱",
    "travel": "火车 车站 机票 机场 酒店 行李 地图 大桥 海岛 护照 旅程 航班 站台 游客 导游 边境 渡轮 公路 高山 村庄",
    "sport": "球队 进球 比赛 球员 教练 赛跑 体育场 比分 联赛 决赛 裁判 训练 网球 游泳 奖牌 赛季 防守 队长 观众 冠军",
    "health": "医生 诊所 病人 护士 药物 发烧 睡眠 血液 心脏 手术 疫苗 症状 疼痛 饮食 锻炼 医院 治疗 剂量 过敏 康复",
    "finance": "银行 贷款 市场 价格 股票 利息 税收 预算 发票 账户 信用 债券 利润 亏损 投资 货币 基金 付款 债务 工资",
    "science": "细胞 能量 轨道 行星 实验室 理论 原子 实验 望远镜 蛋白质 信号 粒子 数据 模型 测量 海洋 气候 物种 引力 化石",
}
_CHINESE_COMMON = "我们 他们 今天 昨天 这个 那个 一些 新的 旧的 很好 开始 发现 需要 因为 但是 所以 然后 已经 可以 还是 觉得 说 在 和 的 了 也 都".split()


def rows(count: int = ROWS, seed: int = 20260918) -> Iterator[dict[str, str]]:
    """``count`` objects with ``text`` and ``label``; the same for the same arguments on every machine."""
    draw = random.Random(seed)
    subjects = sorted(_ENGLISH)
    words = {s: _ENGLISH[s].split() for s in subjects}
    characters = {s: _CHINESE[s].split() for s in subjects}
    for _ in range(count):
        subject = draw.choice(subjects)
        chinese = draw.random() < 0.4
        own, common = (characters, _CHINESE_COMMON) if chinese else (words, _ENGLISH_COMMON)
        length = min(220, max(6, int(draw.lognormvariate(math.log(24), 0.7))))
        chosen: list[str] = []
        for _ in range(length):
            kind = draw.random()
            about = subject if kind < 0.28 else draw.choice(subjects)
            chosen.append(draw.choice(own[about]) if kind < 0.40 else draw.choice(common))
        yield {"text": _sentences(chosen, chinese, draw), "label": subject}


def _sentences(chosen: list[str], chinese: bool, draw: random.Random) -> str:
    """Words joined to sentences of 5 to 14 words."""
    stops, between = ("。", "") if chinese else (". ", " ")
    text, at = "", 0
    while at < len(chosen):
        part = chosen[at : at + draw.randint(5, 14)]
        at += len(part)
        sentence = between.join(part)
        text += (sentence if chinese else sentence[:1].upper() + sentence[1:]) + stops
    return text.strip()


def lines(count: int = ROWS) -> Iterator[str]:
    """The sample as JSON lines, for a file."""
    for row in rows(count):
        yield json.dumps(row, ensure_ascii=False) + "\n"
